// castiron emit --kernel round_x --shape 64 --codec q4_1 --tokens 2 --isa avx2 --threads 2
// 121 lines, sha256 7444f84464138c1ad9429cb85dbda2729cfaddc88bd4d5ce12eac8a717f79f69
        scf.for %7 = %c0 to %c2 step %c3 {
          %9 = arith.muli %7, %c4 : index
          %10 = vector.load %m0[%5, %9] : memref<2x64xf32>, vector<8xf32>
          %11 = arith.addi %9, %c5 : index
          %12 = vector.load %m0[%5, %11] : memref<2x64xf32>, vector<8xf32>
          %13 = arith.addi %9, %c6 : index
          %14 = vector.load %m0[%5, %13] : memref<2x64xf32>, vector<8xf32>
          %15 = arith.addi %9, %c7 : index
          %16 = vector.load %m0[%5, %15] : memref<2x64xf32>, vector<8xf32>
          %17 = math.absf %10 : vector<8xf32>
          %18 = math.absf %12 : vector<8xf32>
          %19 = math.absf %14 : vector<8xf32>
          %20 = math.absf %16 : vector<8xf32>
          %21 = arith.cmpf ogt, %17, %18 : vector<8xf32>
          %22 = arith.select %21, %17, %18 : vector<8xi1>, vector<8xf32>
          %23 = arith.cmpf ogt, %19, %20 : vector<8xf32>
          %24 = arith.select %23, %19, %20 : vector<8xi1>, vector<8xf32>
          %25 = arith.cmpf ogt, %22, %24 : vector<8xf32>
          %26 = arith.select %25, %22, %24 : vector<8xi1>, vector<8xf32>
          %27 = vector.shuffle %26, %26 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
          %28 = vector.shuffle %26, %26 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
          %29 = arith.cmpf ogt, %27, %28 : vector<4xf32>
          %30 = arith.select %29, %27, %28 : vector<4xi1>, vector<4xf32>
          %31 = vector.shuffle %30, %30 [0, 1] : vector<4xf32>, vector<4xf32>
          %32 = vector.shuffle %30, %30 [2, 3] : vector<4xf32>, vector<4xf32>
          %33 = arith.cmpf ogt, %31, %32 : vector<2xf32>
          %34 = arith.select %33, %31, %32 : vector<2xi1>, vector<2xf32>
          %35 = vector.shuffle %34, %34 [0] : vector<2xf32>, vector<2xf32>
          %36 = vector.shuffle %34, %34 [1] : vector<2xf32>, vector<2xf32>
          %37 = arith.cmpf ogt, %35, %36 : vector<1xf32>
          %38 = arith.select %37, %35, %36 : vector<1xi1>, vector<1xf32>
          %39 = vector.extract %38[0] : f32 from vector<1xf32>
          %40 = arith.cmpf olt, %39, %c8 : f32
          %41 = arith.divf %c10, %39 : f32
          %42 = arith.select %40, %c9, %41 : f32
          %43 = vector.broadcast %42 : f32 to vector<8xf32>
          %44 = math.fma %10, %43, %c11 : vector<8xf32>
          %45 = math.fma %12, %43, %c11 : vector<8xf32>
          %46 = math.fma %14, %43, %c11 : vector<8xf32>
          %47 = math.fma %16, %43, %c11 : vector<8xf32>
// 31 lines more
          %76 = arith.addi %67, %c2 : index
          vector.store %75, %m1[%5, %76] : memref<2x16xi32>, vector<2xi32>
          %77 = vector.bitcast %46 : vector<8xf32> to vector<8xi32>
          %78 = arith.trunci %77 : vector<8xi32> to vector<8xi8>
          %79 = vector.shuffle %78, %78 [0, 2, 4, 6, 1, 3, 5, 7] : vector<8xi8>, vector<8xi8>
          %80 = vector.bitcast %79 : vector<8xi8> to vector<2xi32>
          %81 = arith.addi %67, %c1 : index
          vector.store %80, %m1[%5, %81] : memref<2x16xi32>, vector<2xi32>
          %82 = vector.bitcast %47 : vector<8xf32> to vector<8xi32>
          %83 = arith.trunci %82 : vector<8xi32> to vector<8xi8>
          %84 = vector.shuffle %83, %83 [0, 2, 4, 6, 1, 3, 5, 7] : vector<8xi8>, vector<8xi8>
          %85 = vector.bitcast %84 : vector<8xi8> to vector<2xi32>
          %86 = arith.addi %67, %c12 : index
          vector.store %85, %m1[%5, %86] : memref<2x16xi32>, vector<2xi32>
        }
