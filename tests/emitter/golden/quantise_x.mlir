// castiron emit --kernel quantise_x --shape 64 --codec q4_1 --tokens 2 --isa avx2 --threads 2
// 184 lines, sha256 da359f7c50c39584c439620617224045b591c256ff4b5ea917a651b78d5db493
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
          %40 = arith.cmpf olt, %39, %c9 : f32
          %41 = arith.divf %c8, %39 : f32
          %42 = arith.select %40, %c10, %41 : f32
          %43 = vector.broadcast %42 : f32 to vector<8xf32>
          %44 = math.fma %10, %43, %c11 : vector<8xf32>
          %45 = math.fma %12, %43, %c11 : vector<8xf32>
          %46 = math.fma %14, %43, %c11 : vector<8xf32>
          %47 = math.fma %16, %43, %c11 : vector<8xf32>
// 90 lines more
          %127 = vector.shuffle %126, %126 [0, 2, 4, 6, 1, 3, 5, 7] : vector<8xi8>, vector<8xi8>
          %128 = vector.bitcast %127 : vector<8xi8> to vector<2xi32>
          %129 = arith.addi %122, %c2 : index
          vector.store %128, %m1[%5, %129] : memref<2x48xi32>, vector<2xi32>
          %130 = arith.trunci %55 : vector<8xi32> to vector<8xi8>
          %131 = vector.shuffle %130, %130 [0, 2, 4, 6, 1, 3, 5, 7] : vector<8xi8>, vector<8xi8>
          %132 = vector.bitcast %131 : vector<8xi8> to vector<2xi32>
          %133 = arith.addi %122, %c1 : index
          vector.store %132, %m1[%5, %133] : memref<2x48xi32>, vector<2xi32>
          %134 = arith.trunci %57 : vector<8xi32> to vector<8xi8>
          %135 = vector.shuffle %134, %134 [0, 2, 4, 6, 1, 3, 5, 7] : vector<8xi8>, vector<8xi8>
          %136 = vector.bitcast %135 : vector<8xi8> to vector<2xi32>
          %137 = arith.addi %122, %c14 : index
          vector.store %136, %m1[%5, %137] : memref<2x48xi32>, vector<2xi32>
        }
