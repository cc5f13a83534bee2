// castiron emit --kernel selective_scan --shape 1x2x16x16 --tokens 4 --isa avx2 --threads 2
// 197 lines, sha256 780084910291a922ae2b5e5a9f1f0c763d1535bbfc5ca64b5c2b06fd9486bab0
      scf.for %12 = %c0 to %5 step %c4 {
        %14 = memref.load %m1[%12, %1] : memref<4x2xf32>
        %15 = memref.load %m5[%1] : memref<2xf32>
        %16 = arith.addf %14, %15 : f32
        %17 = vector.broadcast %16 : f32 to vector<4xf32>
        %18 = math.absf %17 : vector<4xf32>
        %19 = arith.subf %c5, %18 : vector<4xf32>
        %20 = arith.cmpf ogt, %19, %c6 : vector<4xf32>
        %21 = arith.select %20, %19, %c6 : vector<4xi1>, vector<4xf32>
        %22 = arith.cmpf olt, %21, %c7 : vector<4xf32>
        %23 = arith.select %22, %21, %c7 : vector<4xi1>, vector<4xf32>
        %24 = math.fma %23, %c8, %c9 : vector<4xf32>
        %25 = arith.subf %24, %c9 : vector<4xf32>
        %26 = math.fma %25, %c10, %23 : vector<4xf32>
        %27 = math.fma %25, %c11, %26 : vector<4xf32>
        %28 = math.fma %c12, %27, %c13 : vector<4xf32>
        %29 = math.fma %28, %27, %c14 : vector<4xf32>
        %30 = math.fma %29, %27, %c15 : vector<4xf32>
        %31 = math.fma %30, %27, %c16 : vector<4xf32>
        %32 = arith.mulf %27, %27 : vector<4xf32>
        %33 = math.fma %32, %31, %27 : vector<4xf32>
        %34 = arith.addf %33, %c17 : vector<4xf32>
        %35 = vector.bitcast %24 : vector<4xf32> to vector<4xi32>
        %36 = arith.shli %35, %c18 : vector<4xi32>
        %37 = arith.addi %36, %c19 : vector<4xi32>
        %38 = vector.bitcast %37 : vector<4xi32> to vector<4xf32>
        %39 = arith.mulf %34, %38 : vector<4xf32>
        %40 = arith.cmpf ogt, %17, %c5 : vector<4xf32>
        %41 = arith.select %40, %17, %c5 : vector<4xi1>, vector<4xf32>
        %42 = math.log1p %39 : vector<4xf32>
        %43 = arith.addf %41, %42 : vector<4xf32>
        %44 = memref.load %m4[%1] : memref<2xf32>
        %45 = vector.broadcast %44 : f32 to vector<4xf32>
        %46 = arith.mulf %43, %45 : vector<4xf32>
        %47 = arith.cmpf ogt, %46, %c6 : vector<4xf32>
        %48 = arith.select %47, %46, %c6 : vector<4xi1>, vector<4xf32>
        %49 = arith.cmpf olt, %48, %c7 : vector<4xf32>
        %50 = arith.select %49, %48, %c7 : vector<4xi1>, vector<4xf32>
        %51 = math.fma %50, %c8, %c9 : vector<4xf32>
        %52 = arith.subf %51, %c9 : vector<4xf32>
// 6 lines more
        %59 = arith.mulf %54, %54 : vector<4xf32>
        %60 = math.fma %59, %58, %54 : vector<4xf32>
        %61 = arith.addf %60, %c17 : vector<4xf32>
        %62 = vector.bitcast %51 : vector<4xf32> to vector<4xi32>
        %63 = arith.shli %62, %c18 : vector<4xi32>
        %64 = arith.addi %63, %c19 : vector<4xi32>
        %65 = vector.bitcast %64 : vector<4xi32> to vector<4xf32>
        %66 = arith.mulf %61, %65 : vector<4xf32>
        %67 = vector.extract %43[0] : f32 from vector<4xf32>
        %68 = arith.subi %12, %c0 : index
        memref.store %67, %10[%c0, %68] : memref<2x4xf32>
        %69 = vector.extract %66[0] : f32 from vector<4xf32>
        %70 = arith.subi %12, %c0 : index
        memref.store %69, %10[%c4, %70] : memref<2x4xf32>
      }
